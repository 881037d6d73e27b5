"""CPU kernels in C++, compiled for the processor they run on; see `bindings`."""
