"""The clients' methods: their names, arguments and results."""
