"""Work on what a client sent that may run away, in processes that can be killed: schemas, large prompts, later media.

A call has a limit of CPU time, wall time and memory. A process that exceeds one is replaced, and the request that was
being prepared is refused as the cause; nobody else's request is affected, and the event loop is never blocked.
"""
