"""The launcher behind `ssdtrain train`; its modules import their extras only when a command needs them."""
