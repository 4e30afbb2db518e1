"""The compiler: message functions to edge programs to kernels."""
