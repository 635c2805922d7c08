{{- define "npu-node.name" -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "npu-node.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "npu-node.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: node
{{- end -}}

{{- define "npu-node.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "npu-node.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.keys -}}
{{ include "npu-node.name" . }}-keys
{{- end -}}
{{- end -}}

{{/* As strict as the systemd unit: no privilege, no capability, nothing writable but what is mounted. */}}
{{- define "npu-node.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
privileged: false
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "npu-node.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
supplementalGroups: [{{ .Values.deviceGroup }}]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "npu-node.environment" -}}
- name: NPU_NODE_HOST
  value: 0.0.0.0
- name: NPU_NODE_PORT
  value: {{ .Values.port | quote }}
- name: NPU_NODE_DRAIN_TIMEOUT_S
  value: {{ .Values.drainSeconds | quote }}
- name: NPU_NODE_MODEL_STORE
  value: /models/store
- name: XDG_CACHE_HOME
  value: /models/cache
- name: HOME
  value: /tmp
- name: PYTHONDONTWRITEBYTECODE
  value: "1"
{{- if include "npu-node.keysSecret" . }}
- name: NPU_NODE_API_KEYS_FILE
  value: /etc/npu-node-keys/api_keys
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
