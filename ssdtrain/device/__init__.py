"""Moving bytes between the memory that autograd uses and buffers that a store takes."""
