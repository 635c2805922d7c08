"""Check rendered manifests against the schemas of several Kubernetes versions: `validate.py VERSION …`, YAML on stdin.

Prints the kinds that have no schema (those of operators); a manifest that breaks a schema ends it with a traceback.
"""

import sys

import kubernetes_validate
import yaml

documents = [document for document in yaml.safe_load_all(sys.stdin) if document]
unknown = set()
for document in documents:
    for version in sys.argv[1:]:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            unknown.add(document["kind"])
print(len(documents), *sorted(unknown))
