"""Write the three WinGet manifests of npu-client: `winget.py URL ARCHIVE DIRECTORY`. NOT RUN ON WINDOWS.

ARCHIVE is a zip with npu-client.exe at its root, and URL where it is published; its hash goes into the manifest.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
IDENTIFIER, PUBLISHER = "NpuNode.NpuClient", "the npu-node project"
SCHEMA = "1.6.0"


def manifests(url: str, archive: Path) -> dict[str, dict[str, object]]:
    """The content of each file, by its name."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    head = {"PackageIdentifier": IDENTIFIER, "PackageVersion": version}
    installer = {
        "Architecture": "x64",
        "InstallerUrl": url,
        "InstallerSha256": hashlib.sha256(archive.read_bytes()).hexdigest().upper(),
    }
    program = {"RelativeFilePath": "npu-client.exe", "PortableCommandAlias": "npu-client"}
    return {
        f"{IDENTIFIER}.yaml": {**head, "DefaultLocale": "en-US", **_kind("version")},
        f"{IDENTIFIER}.installer.yaml": {
            **head,
            "InstallerType": "zip",
            "NestedInstallerType": "portable",
            "NestedInstallerFiles": [program],
            "Installers": [installer],
            **_kind("installer"),
        },
        f"{IDENTIFIER}.locale.en-US.yaml": {
            **head,
            "PackageLocale": "en-US",
            "Publisher": PUBLISHER,
            "PackageName": "npu-client",
            "License": "Apache-2.0",
            "ShortDescription": "Client of inference nodes for Intel NPUs: health, embeddings, generation, data sets.",
            **_kind("defaultLocale"),
        },
    }


def _kind(name: str) -> dict[str, object]:
    return {"ManifestType": name, "ManifestVersion": SCHEMA}


def main() -> None:
    """Write the files; JSON is YAML too."""
    url, archive, directory = sys.argv[1:]
    for name, content in manifests(url, Path(archive)).items():
        path = Path(directory, name)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
