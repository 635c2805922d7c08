"""What a machine lacks for its NPU to work, each with its fix; read from files, changing nothing."""
