{{/* Labels of every object. */}}
{{- define "thaw.labels" -}}
app.kubernetes.io/part-of: thaw
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/instance: {{ .Release.Name }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Metadata of an object: (dict "root" $ "name" NAME). */}}
{{- define "thaw.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "thaw.labels" .root | nindent 2 }}
{{- end }}

{{/* Image of the mesh's services or of nodes: (dict "root" $ "of" "mesh"). */}}
{{- define "thaw.image" -}}
{{- $image := index .root.Values.images .of -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* A pod runs as the services' user and knows nothing of the cluster's API. */}}
{{- define "thaw.pod" -}}
automountServiceAccountToken: false
# Services named like ours would set environment variables in every container.
enableServiceLinks: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Security context of a pod: (dict "user" ID "changePolicy" true). */}}
{{- define "thaw.user" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
{{- if .onRootMismatch }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "thaw.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Replicas of a service on different nodes, if possible. */}}
{{- define "thaw.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: {{ .when }}
  labelSelector:
    matchLabels: {app.kubernetes.io/name: {{ .name }}}
{{- end }}

{{/* Pods restart when settings change. */}}
{{- define "thaw.checksum" -}}
checksum/settings: {{ include (print .Template.BasePath "/settings.yaml") . | sha256sum }}
{{- end }}

{{- define "thaw.rules.cidrs" -}}
{{- range .cidrs }}
- ipBlock: {cidr: {{ . | quote }}}
{{- end }}
{{- end }}

{{/* Values of a pool of nodes as YAML: those of `node`, with those of the pool over them. (dict "root" $ "pool" VALUES) */}}
{{- define "thaw.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.node) (deepCopy (.pool | default dict)) | toYaml }}
{{- end }}

{{/* THAW_DEVICES of a pool. */}}
{{- define "thaw.devices" -}}
{{- if .devices -}}
{{ .devices }}
{{- else if not .gpus -}}
{{ fail "A pool of nodes without GPUs (gpus: 0) needs `devices`, for example cpu:0=4GiB" }}
{{- else -}}
{{- $devices := list -}}
{{- range until (int .gpus) }}{{ $devices = append $devices (printf "cuda:%d" .) }}{{ end -}}
{{ join "," $devices }}
{{- end -}}
{{- end }}

{{/* Configuration of NATS: that of compose/nats.conf, with the routes of several servers. */}}
{{- define "thaw.nats" -}}
{{- $count := int .Values.nats.replicas -}}
{{- if gt $count 1 -}}
server_name: $POD_NAME
{{ end -}}
listen: "0.0.0.0:4222"
http: "127.0.0.1:8222"
max_payload: 8MB
# NATS sets aside what streams and buckets may hold at most (784 MiB; THAW_IDEMPOTENCY_BYTES is 256 MiB of it): docs/operations.md.
# sync_interval: a write is on the disk before it is acknowledged (docs/adr/0048).
jetstream { store_dir: "/data", sync_interval: always, max_file_store: 2200MB, max_memory_store: 64MB }
{{- if gt $count 1 }}
{{- $routes := list }}
{{- range until $count }}{{ $routes = append $routes (printf "nats://nats-%d.nats-servers:6222" . | quote) }}{{ end }}
cluster {
  name: thaw
  listen: "0.0.0.0:6222"
  routes: [{{ join ", " $routes }}]
}
{{- end }}
# Relative to this file, as includes are: /run/thaw-secrets/authorization.conf.
authorization { include "../../run/thaw-secrets/authorization.conf" }
{{- end }}

{{/* The volume of a server in the cluster. */}}
{{- define "thaw.claim" -}}
- metadata:
    name: data
    labels: {app.kubernetes.io/part-of: thaw}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests: {storage: {{ .storage }}}
{{- end }}
