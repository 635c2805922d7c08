"""Reranking: a query and documents to scores.

`service.rerank` is the whole way of a request and the place to begin reading; `published` says which models are
rerankers, `conversion` makes their graphs, and engines are those of `worker_node.encoders`. Imports everything below
`tasks`, and `http` in its module of that name only."""
