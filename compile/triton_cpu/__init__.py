"""A Triton backend for CPUs: kernels become C++, the machine's compiler builds them, a thread team runs the grid.

Triton finds it through the entry point `cpu` of the group `triton.backends`, and imports `compiler` and `driver` while
it is itself imported. So nothing is imported here, and those two modules import nothing that can fail.
"""
