"""Where people train: one module for each trainer that needs more than a `with`."""
