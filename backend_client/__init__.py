"""The client that backend services call NPU worker nodes with."""
