"""Reading Megatron-LM's checkpoints: tensors by the names of the table, and arguments."""
