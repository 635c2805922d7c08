"""Embedding: texts to vectors.

`service.embed` is the whole way of a request and the place to begin reading; models are opened and examined there, too.
`http` has the routes in every dialect. Engines are those of `worker_node.encoders`. Imports everything below `tasks`,
and `http` in its module of that name only."""
