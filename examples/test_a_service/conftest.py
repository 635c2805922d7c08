pytest_plugins = ["backend_client.testing.plugin"]
