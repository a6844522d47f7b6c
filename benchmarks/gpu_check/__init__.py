"""One short check of the Triton kernels on a real GPU: are they right, and how near are they to what the GPU can do."""
