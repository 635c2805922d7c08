"""Speech recognition: audio in, text with times out.

`service.transcribe` is the way of a request and the place to begin reading. `audio` decodes the upload, finds speech in
it, both in processes that may be killed, and cuts it; `engine` runs Whisper. The edge process imports neither PyAV nor
OpenVINO for it. Imports everything below `tasks`, and `http` in its module of that name only.
"""
