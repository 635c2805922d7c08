"""A control plane of Kubernetes on loopback, of its own programs: API server, etcd, controllers and scheduler.

Nodes are objects only, without kubelets: `Cluster.settle` does of a kubelet's work what the controllers wait for.
"""

import contextlib
import http.client
import json
import os
import secrets
import shutil
import ssl
import subprocess
import time
import urllib.parse
from pathlib import Path

from tests.support.ports import free_port

# What setup-envtest sets, too: a directory with the programs.
VARIABLE = "KUBEBUILDER_ASSETS"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
# For hangs only: this machine may be busy.
HANG_S = 240
DEVICE = "npu.intel.com/accel"
LABEL = "intel.feature.node.kubernetes.io/npu"


def missing_programs():
    """What is missing for a control plane, in words; None if nothing."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return f"{VARIABLE} names no directory with {', '.join(PROGRAMS)} (docs/cluster.md)"
    absent = [name for name in PROGRAMS if not (Path(directory) / name).exists()]
    return f"{directory} has no {', '.join(absent)}" if absent else None


def openssl(*arguments):
    """Run openssl."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """A certificate authority, and what it issues, in a directory."""

    def __init__(self, directory):
        self.directory = directory
        self.cert = directory / "ca.crt"
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._new_key = new_key
        # Python 3.13 refuses certificates that leave out what RFC 5280 asks for.
        subject = ("-subj", "/CN=test authority", "-days", "2", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        openssl("req", "-x509", *new_key, "-keyout", directory / "ca.key", *subject, "-out", self.cert)

    def issue(self, name, subject, names=""):
        """A certificate and its key."""
        cert, key, request = (self.directory / f"{name}.{end}" for end in ("crt", "key", "csr"))
        extensions = self.directory / f"{name}.ext"
        wanted = ["extendedKeyUsage=serverAuth,clientAuth", "authorityKeyIdentifier=keyid", "subjectKeyIdentifier=hash"]
        extensions.write_text("\n".join([*wanted, *([f"subjectAltName={names}"] if names else [])]) + "\n")
        openssl("req", *self._new_key, "-keyout", key, "-subj", subject, "-out", request)
        signed_by = ("-CA", self.cert, "-CAkey", self.directory / "ca.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", request, *signed_by, "-extfile", extensions, "-out", cert)
        return cert, key


class Refused(Exception):
    """The API server refused a request."""


class Cluster:
    """A running control plane. `kubeconfig` is an administrator's."""

    def __init__(self, directory, stack):
        self._programs = Path(os.environ[VARIABLE])
        self._directory = directory
        self._stack = stack
        self._processes = {}
        self._addresses = 0
        authority = Authority(directory)
        self._port = free_port()
        cert, key = authority.issue("server", "/CN=kube-apiserver", "IP:127.0.0.1,IP:10.0.0.1,DNS:localhost")
        admin = authority.issue("admin", "/O=system:masters/CN=admin")
        openssl("genrsa", "-out", directory / "accounts.key", "2048")
        openssl("rsa", "-in", directory / "accounts.key", "-pubout", "-out", directory / "accounts.pub")
        self._tls = ssl.create_default_context(cafile=str(authority.cert))
        self._tls.load_cert_chain(*map(str, admin))
        etcd, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._start(
            "etcd",
            f"--data-dir={directory / 'etcd'}",
            *(f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}"),
            *(f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}", "--unsafe-no-fsync"),
        )
        self._start(
            "kube-apiserver",
            *(f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"),
            *(f"--secure-port={self._port}", "--service-cluster-ip-range=10.0.0.0/24", "--allow-privileged"),
            *(f"--tls-cert-file={cert}", f"--tls-private-key-file={key}", f"--client-ca-file={authority.cert}"),
            *("--authorization-mode=Node,RBAC", "--service-account-issuer=https://kubernetes.default.svc"),
            f"--service-account-key-file={directory / 'accounts.pub'}",
            f"--service-account-signing-key-file={directory / 'accounts.key'}",
        )
        self.kubeconfig = self._write_kubeconfig("admin", authority, *admin)
        self.wait_until(lambda: self.request("GET", "/readyz", raw=True) == "ok", "the API server is ready")
        controllers = self._write_kubeconfig(
            "controllers",
            authority,
            *authority.issue("controllers", "/O=system:masters/CN=system:kube-controller-manager"),
        )
        own = ("--bind-address=127.0.0.1", "--leader-elect=false")
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={controllers}",
            # Nodes without a kubelet renew no lease: nobody is to hold that against them.
            *("--controllers=*,-node-lifecycle-controller,-taint-eviction-controller", *own),
            f"--secure-port={free_port()}",
            f"--service-account-private-key-file={directory / 'accounts.key'}",
            *("--concurrent-gc-syncs=5", f"--root-ca-file={authority.cert}"),
        )
        scheduler = self._write_kubeconfig(
            "scheduler", authority, *authority.issue("scheduler", "/O=system:masters/CN=system:kube-scheduler")
        )
        self._start("kube-scheduler", f"--kubeconfig={scheduler}", f"--secure-port={free_port()}", *own)

    def request(self, method, path, body=None, *, raw=False, kind="application/json", **query):
        """One request; the parsed reply. Raises Refused with the server's message."""
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._tls, timeout=60)
        query = f"?{urllib.parse.urlencode(query)}" if query else ""
        try:
            connection.request(method, path + query, None if body is None else json.dumps(body), {"Content-Type": kind})
            reply = connection.getresponse()
            text = reply.read().decode()
        except OSError as error:
            raise Refused(str(error)) from None
        finally:
            connection.close()
        if reply.status >= 400:
            raise Refused(f"{reply.status}: {text[:2000]}")
        return text if raw else json.loads(text)

    def items(self, path, selector=""):
        """The objects of a list, as dictionaries."""
        query = {"labelSelector": selector} if selector else {}
        return self.request("GET", path, **query)["items"]

    def add_node(self, name, *, device=1, label="true"):
        """A machine with so many NPUs, that is ready."""
        labels = {"kubernetes.io/hostname": name, **({LABEL: label} if label else {})}
        self.request(
            "POST",
            "/api/v1/nodes",
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}},
        )
        amounts = {"cpu": "16", "memory": "64Gi", "pods": "110", "ephemeral-storage": "500Gi"}
        amounts |= {DEVICE: str(device)} if device else {}
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", **_times()}
        status = {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}
        merge = "application/merge-patch+json"
        self.request("PATCH", f"/api/v1/nodes/{name}/status", status, kind=merge)
        self.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": []}}, kind=merge)

    def add_namespace(self, level):
        """A new namespace with this level of Pod Security enforced; its name."""
        name = f"t-{level}-{secrets.token_hex(3)}"
        labels = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "warn")}
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        self.request("POST", "/api/v1/namespaces", body)
        # Pods need the account that a controller makes for each namespace.
        self.wait_until(lambda: self.items(f"/api/v1/namespaces/{name}/serviceaccounts"), "the account is there")
        return name

    def pods(self, namespace, component):
        """The pods of a component of the chart that are not being deleted."""
        found = self.items(f"/api/v1/namespaces/{namespace}/pods", f"app.kubernetes.io/component={component}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def run_kubelets(self, namespace, *, phase=lambda _pod: "Running", code=1):
        """Once: report each pod that is bound to a machine in the `phase`, and remove those that are to go.

        `code` is the exit code of pods whose phase is Failed.
        """
        base = f"/api/v1/namespaces/{namespace}/pods"
        for pod in self.items(base):
            name = pod["metadata"]["name"]
            with contextlib.suppress(Refused):  # it may be gone by now
                if "deletionTimestamp" in pod["metadata"]:
                    self.request("DELETE", f"{base}/{name}", {"gracePeriodSeconds": 0})
                elif pod["spec"].get("nodeName") and pod.get("status", {}).get("phase") == "Pending":
                    self._report(f"{base}/{name}/status", pod, phase(pod), code)

    def _report(self, path, pod, phase, code):
        running = phase == "Running"
        condition = {"type": "Ready", "status": str(running), **_times()}
        codes = {"Succeeded": 0, "Failed": code}
        state = (
            {"running": {"startedAt": _now()}}
            if running
            else {"terminated": {"exitCode": codes[phase], "finishedAt": _now(), "startedAt": _now()}}
        )
        name = pod["spec"]["containers"][0]["name"]
        container = {"name": name, "image": "x", "imageID": "x", "ready": running, "restartCount": 0, "state": state}
        self._addresses += 1
        address = f"10.1.{self._addresses // 250}.{self._addresses % 250 + 1}"
        status = {"phase": phase, "conditions": [condition], "containerStatuses": [container]}
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
        self.request("PATCH", path, {"status": status}, kind="application/merge-patch+json")

    def settle(self, namespace, condition, what, **options):
        """Do the kubelets' work until the condition holds."""

        def step():
            self.run_kubelets(namespace, **options)
            return condition()

        return self.wait_until(step, what)

    def events(self, namespace):
        """The messages of the namespace's events."""
        return [event.get("message", "") for event in self.items(f"/api/v1/namespaces/{namespace}/events")]

    def wait_until(self, condition, what):
        """Ask until the condition holds; what it returned."""
        deadline = time.monotonic() + HANG_S
        problem = None
        while time.monotonic() < deadline:
            for name, process in self._processes.items():
                assert process.poll() is None, f"{name} ended:\n{self._log(name)[-3000:]}"
            try:
                found = condition()
            except Refused as error:
                problem = error
            else:
                if found:
                    return found
            time.sleep(0.1)
        raise AssertionError(f"not within {HANG_S} s: {what} ({problem})")

    def _start(self, name, *arguments):
        log = self._stack.enter_context((self._directory / f"{name}.log").open("w"))
        command = [self._programs / name, *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._directory)
        self._processes[name] = process
        self._stack.callback(_stop, process)

    def _log(self, name):
        return (self._directory / f"{name}.log").read_text()

    def _write_kubeconfig(self, name, authority, cert, key):
        path = self._directory / f"{name}.kubeconfig"
        server = {"server": f"https://127.0.0.1:{self._port}", "certificate-authority": str(authority.cert)}
        user = {"client-certificate": str(cert), "client-key": str(key)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "c", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        }
        path.write_text(json.dumps(config))
        return path


@contextlib.contextmanager
def control_plane(directory):
    """A cluster in a new directory, without machines."""
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory / "etcd", ignore_errors=True)
        yield Cluster(directory, stack)


def _stop(process):
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _times():
    return {"lastTransitionTime": _now()}
