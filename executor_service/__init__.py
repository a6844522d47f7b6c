"""The data plane: holds weights and the physical KV cache, runs steps against the block tables it is sent."""
