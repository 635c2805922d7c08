"""Vision-language models: their files, engines and canary. They are generation models, served by `tasks.generate`."""
