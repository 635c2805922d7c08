"""The subcommands of `npu-node`: one file each, with `add_parser(subparsers)` and `run(args)`."""
