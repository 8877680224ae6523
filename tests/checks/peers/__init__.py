"""The kernels of others on the interpreter, against their own references."""
