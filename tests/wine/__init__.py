"""Windows' Python and Intel's NPU compiler, under Wine: what can be proven without Windows and without an NPU."""
