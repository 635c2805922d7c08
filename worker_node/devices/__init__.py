"""What the kernel and OpenVINO report of this machine's devices, and what is compiled for them. Imports `core` only.

Begin with `npu.py`. Only `blobs.py` imports OpenVINO: the edge process, which imports the others, must not load it.
"""
