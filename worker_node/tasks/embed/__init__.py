"""Embedding: texts to vectors.

`service.embed` is the whole way of a request and the place to begin reading; `http` has its routes in every dialect,
`building` how models are built and examined. Engines are those of `worker_node.encoders`. Imports everything below
`tasks`, and `http` in its module of that name only."""
