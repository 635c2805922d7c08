"""Reranking: a query and documents to scores.

`service.rerank` is the whole way of a request and the place to begin reading; `conversion` says which models are
rerankers and makes their graphs. Engines are those of `worker_node.encoders`. Imports everything below `tasks`, and
`http` in its module of that name only."""
