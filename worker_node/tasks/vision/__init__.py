"""Vision-language models: their files, engines and canary. They are generation models, served by `tasks.generate`.

Begin with `building`, then `engine`. Imports everything below `tasks`, and `tasks.generate`.
"""
