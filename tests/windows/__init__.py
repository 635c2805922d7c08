"""What Windows alone has. Linux runs it under Wine: make test-windows."""
