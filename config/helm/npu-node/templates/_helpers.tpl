{{- define "npu-node.name" -}}
{{- .Values.fullnameOverride | default (printf "%s-%s" .Release.Name .Chart.Name) | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{- define "npu-node.labels" -}}
{{ include "npu-node.instance" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What does not change with the version of the chart: for selectors, and for what Kubernetes does not let change. */}}
{{- define "npu-node.instance" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "npu-node.selector" -}}
{{ include "npu-node.instance" . }}
app.kubernetes.io/component: node
{{- end -}}

{{- define "npu-node.gatewaySelector" -}}
{{ include "npu-node.instance" . }}
app.kubernetes.io/component: gateway
{{- end -}}

{{- define "npu-node.image" -}}
{{ include "npu-node.imageOf" (dict "root" . "image" .Values.image) }}
{{- end -}}

{{/* An image by its digest or tag; the nodes' where it names no repository. */}}
{{- define "npu-node.imageOf" -}}
{{- $image := ternary .image .root.Values.image (not (empty .image.repository)) -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "npu-node.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.keys -}}
{{ include "npu-node.name" . }}-keys
{{- end -}}
{{- end -}}

{{/* Where callers find the nodes. Certificates are for names, so https takes those that the Service's SRV records have. */}}
{{- define "npu-node.nodes" -}}
{{- if .Values.tls.existingSecret -}}
srv+https://_http._tcp.{{ include "npu-node.name" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- else -}}
dns://{{ include "npu-node.name" . }}:{{ .Values.port }}
{{- end -}}
{{- end -}}

{{/* What the chart's own callers of nodes need: the Job of `bulk`, and the gateway. */}}
{{- define "npu-node.callerEnvironment" -}}
# Every pod behind the headless Service is a node.
- name: NPU_CLIENT_NODES
  value: {{ include "npu-node.nodes" . }}
- name: HOME
  value: /tmp
{{- if include "npu-node.keysSecret" . }}
- name: NPU_CLIENT_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "npu-node.keysSecret" . }}
      key: client_key
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: NPU_CLIENT_CA_FILE
  value: /etc/npu-node-tls/ca.crt
{{- end }}
{{- if .Values.tls.clientSecret }}
- name: NPU_CLIENT_CLIENT_CERT
  value: /etc/npu-node-caller/tls.crt
- name: NPU_CLIENT_CLIENT_KEY
  value: /etc/npu-node-caller/tls.key
{{- end }}
{{- end -}}

{{- define "npu-node.callerMounts" -}}
{{- if .Values.tls.existingSecret }}
- name: tls
  mountPath: /etc/npu-node-tls
  readOnly: true
{{- end }}
{{- if .Values.tls.clientSecret }}
- name: caller
  mountPath: /etc/npu-node-caller
  readOnly: true
{{- end }}
{{- end -}}

{{- define "npu-node.callerVolumes" -}}
{{- with .Values.tls.existingSecret }}
# The authority only: the nodes' own key is not for their callers.
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- with .Values.tls.clientSecret }}
- name: caller
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* As strict as the systemd unit: no privilege, no capability, nothing writable but what is mounted. */}}
{{- define "npu-node.containerSecurity" -}}
{{ include "npu-node.unprivileged" . }}
readOnlyRootFilesystem: true
{{- end -}}

{{- define "npu-node.unprivileged" -}}
allowPrivilegeEscalation: false
privileged: false
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "npu-node.podSecurity" -}}
{{ include "npu-node.user" . }}
supplementalGroups: [{{ int64 .Values.deviceGroup }}]
{{- end -}}

{{- define "npu-node.user" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.user }}
runAsGroup: {{ int64 .Values.user }}
fsGroup: {{ int64 .Values.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "npu-node.directories" -}}
- name: NPU_NODE_MODEL_STORE
  value: /models/store
- name: NPU_NODE_COMPILE_CACHE
  value: /models/compiled
- name: XDG_CACHE_HOME
  value: /models/cache
- name: HOME
  value: /tmp
{{- end -}}

{{- define "npu-node.environment" -}}
- name: NPU_NODE_HOST
  value: 0.0.0.0
- name: NPU_NODE_PORT
  value: {{ .Values.port | quote }}
- name: NPU_NODE_DRAIN_TIMEOUT_S
  value: {{ .Values.drainSeconds | quote }}
{{ include "npu-node.directories" . }}
- name: PYTHONDONTWRITEBYTECODE
  value: "1"
{{- if include "npu-node.keysSecret" . }}
- name: NPU_NODE_API_KEYS_FILE
  value: /etc/npu-node-keys/api_keys
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: NPU_NODE_TLS_CERT
  value: /etc/npu-node-tls/tls.crt
- name: NPU_NODE_TLS_KEY
  value: /etc/npu-node-tls/tls.key
{{- if .Values.tls.clientSecret }}
- name: NPU_NODE_TLS_CLIENT_CA
  value: /etc/npu-node-tls/ca.crt
{{- end }}
{{- end }}
{{- if .Values.allowUnauthenticated }}
- name: NPU_NODE_ALLOW_UNAUTHENTICATED
  value: "true"
{{- end }}
{{- if .Values.emulation }}
- name: NPU_NODE_NPU_EMULATION
  value: "1"
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Asks a path of /health. A kubelet has no certificate to show, so a program of the pod asks where one is needed. As a
kubelet, it verifies nothing. A node that refuses the certificate is alive: callers with a valid one are served.
*/}}
{{- define "npu-node.probe" -}}
{{- if .root.Values.tls.clientSecret -}}
exec:
  command:
    - python3
    - -c
    - |
      import http.client, ssl, sys
      tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
      tls.check_hostname = False
      tls.verify_mode = ssl.CERT_NONE
      tls.load_cert_chain("/etc/npu-node-caller/tls.crt", "/etc/npu-node-caller/tls.key")
      node = http.client.HTTPSConnection("127.0.0.1", {{ .root.Values.port }}, timeout=4, context=tls)
      try:
          node.request("GET", "{{ .path }}")
          status = node.getresponse().status
          sys.exit(status != 200 and f"status {status}")
      except (ssl.SSLError, ConnectionResetError, BrokenPipeError) as error:
          sys.exit("{{ .path }}" != "/health/live" and f"refused: {error}")
{{- else -}}
httpGet:
  path: {{ .path }}
  port: http
  {{- if .root.Values.tls.existingSecret }}
  scheme: HTTPS
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "npu-node.modelsVolume" -}}
- name: models
  {{- if eq .Values.models.volume "hostPath" }}
  hostPath:
    path: {{ .Values.models.path }}
    type: DirectoryOrCreate
  {{- else if eq .Values.models.volume "pvc" }}
  persistentVolumeClaim:
    claimName: {{ required "models.claim names the claim of models.volume: pvc" .Values.models.claim }}
  {{- else if .Values.models.size }}
  emptyDir:
    sizeLimit: {{ .Values.models.size }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end -}}

{{- define "npu-node.resources" -}}
requests:
  {{- toYaml .Values.resources.requests | nindent 2 }}
  {{- with .Values.resourceKey }}
  {{ . }}: "1"
  {{- end }}
limits:
  {{- toYaml .Values.resources.limits | nindent 2 }}
  {{- with .Values.resourceKey }}
  {{ . }}: "1"
  {{- end }}
{{- end -}}

{{/* The machines' labels: those of the values, else NFD's label of machines with an NPU where a device is asked for. */}}
{{- define "npu-node.nodeSelector" -}}
{{- if .own -}}
{{ toYaml .own }}
{{- else if .root.Values.resourceKey -}}
intel.feature.node.kubernetes.io/npu: "true"
{{- end -}}
{{- end -}}

{{/* Where the pods of nodes and of Ray's workers may run. */}}
{{- define "npu-node.placement" -}}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}
