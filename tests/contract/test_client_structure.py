"""The layers of the client's source: one direction of dependency and no circles, held by reading imports."""

from tests.support.source_tree import CLIENT_FILES, ROOT, imports_of, reject

# From the bottom up. Public modules are those without an underscore; each may import what stands in its set.
CLIENT_MAY_IMPORT = {
    "results": set(),
    "options": set(),
    "errors": {"results"},
    "_resilience": {"errors", "options", "results"},
    "_protocol": {"_resilience", "errors", "options", "results"},
    "settings": {"_protocol", "_resilience", "errors", "options", "results"},
}
_BELOW = set(CLIENT_MAY_IMPORT)
CLIENT_MAY_IMPORT |= {
    "_fleet": _BELOW,
    "_cloud": _BELOW,
    "_routing": _BELOW | {"_fleet", "_cloud"},
    "_api": _BELOW | {"_fleet", "_cloud", "_routing"},
}
CLIENT_MAY_IMPORT |= {
    "cloud": set(CLIENT_MAY_IMPORT),
    "sync": set(CLIENT_MAY_IMPORT),
    "observability": set(CLIENT_MAY_IMPORT) | {"sync"},
    "__init__": set(CLIENT_MAY_IMPORT) | {"cloud"},
}
CLIENT_MAY_IMPORT |= {"bulk": set(CLIENT_MAY_IMPORT)}
CLIENT_MAY_IMPORT |= {"testing": set(CLIENT_MAY_IMPORT) - {"bulk"}}
CLIENT_MAY_IMPORT |= {"_cli": set(CLIENT_MAY_IMPORT), "__main__": {"_cli"}}


def client_layer_of(path):
    return path.relative_to(ROOT / "backend_client").parts[0].removesuffix(".py")


def client_imports(path):
    """The modules of the client that a file imports, by the files that define them."""
    for module in imports_of(path):
        parts = module.split(".")
        if parts[0] == "backend_client" and len(parts) > 1:
            yield parts


def test_the_clients_layers_import_only_layers_below_them():
    violations = []
    for path in CLIENT_FILES:
        layer = client_layer_of(path)
        if layer not in CLIENT_MAY_IMPORT:
            violations.append(f"{path}: {layer} is missing from CLIENT_MAY_IMPORT: is it public, or part of a layer?")
            continue
        allowed = CLIENT_MAY_IMPORT[layer] | {layer}
        violations += [
            f"{layer} must not import {parts[1]}: {path} imports {'.'.join(parts)}"
            for parts in client_imports(path)
            if parts[1] in CLIENT_MAY_IMPORT and parts[1] not in allowed
        ]
    reject(violations)


def test_no_modules_of_the_client_import_each_other_in_a_circle():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in CLIENT_FILES}
    imports = {
        name: {module for parts in client_imports(path) if (module := ".".join(parts)) in files}
        for name, path in files.items()
    }
    while ends := {name for name, imported in imports.items() if not imported - {name}}:
        imports = {name: imported - ends for name, imported in imports.items() if name not in ends}
    assert not imports, f"in circles, or importing one: {sorted(imports)}"


def test_the_client_knows_nothing_of_the_node():
    reject(
        [
            f"{path} imports {module}"
            for path in CLIENT_FILES
            for module in imports_of(path)
            if module.startswith("worker_node")
        ]
    )
