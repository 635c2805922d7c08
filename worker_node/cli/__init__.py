"""`npu-node`, the command line. It may import every other package; nothing imports it. Begin with `main.py`.

A module declares its commands without heavy imports: what a command runs is imported when it runs, so that
`npu-node ps` does not wait for the model store, nor `npu-node list` for OpenVINO.
"""
