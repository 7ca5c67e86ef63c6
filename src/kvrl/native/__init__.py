"""C++ kernels for the CPU, compiled when they are first used."""
