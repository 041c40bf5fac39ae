{{- define "vllm.labels" -}}
app.kubernetes.io/name: vllm
app.kubernetes.io/part-of: encoder-service
{{- end -}}

{{- define "vllm.renderLabels" -}}
app.kubernetes.io/name: vllm-render
app.kubernetes.io/part-of: encoder-service
{{- end -}}

{{/* How the connector reaches the encoders (docs/vllm.md). */}}
{{- define "vllm.service" -}}
endpoints: {{ .Values.encoders | quote }}
{{- with .Values.tls }}{{ if .enabled }}
tls_ca: /etc/encoder/ca.crt
tls_cert: /etc/encoder/tls.crt
tls_key: /etc/encoder/tls.key
tls_name: {{ .name | quote }}
token_file: /etc/encoder/token
{{- end }}{{ end }}
{{- end -}}

{{/* What engines and render servers have in common: the arguments after the model. */}}
{{- define "vllm.arguments" -}}
- --served-model-name={{ required "servedName: the name of the model in requests is required" .Values.servedName }}
- --dtype=bfloat16
- --max-model-len={{ .Values.contextLength }}
- --middleware=prefill_client.vllm.middleware.EncoderServiceMiddleware
{{- end -}}

{{/* The argument for a connector with these settings. */}}
{{- define "vllm.transfer" -}}
- --ec-transfer-config={{ dict "ec_connector" "EncoderServiceConnector" "ec_connector_module_path" "prefill_client.vllm.connector" "ec_role" "ec_consumer" "ec_connector_extra_config" . | toJson }}
{{- end -}}

{{- define "vllm.env" -}}
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: VLLM_NO_USAGE_STATS, value: "1"}
{{- with .Values.nameKeySecret }}
- name: ENCODER_SERVICE_NAME_KEY
  valueFrom: {secretKeyRef: {name: {{ . }}, key: name-key}}
{{- end }}
{{- end -}}

{{/* The start of a pod, up to its containers. */}}
{{- define "vllm.pod" -}}
automountServiceAccountToken: false
# Otherwise Kubernetes injects VLLM_PORT for the Service `vllm`, and vLLM reads it as one of its settings.
enableServiceLinks: false
terminationGracePeriodSeconds: 60
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "vllm.tolerations" -}}
- {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: {{ .Values.deadNodeSeconds }}}
- {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: {{ .Values.deadNodeSeconds }}}
{{- end -}}

{{/* Ports, probes and security of a container, after its environment. */}}
{{- define "vllm.container" -}}
ports:
  - {name: http, containerPort: 8000}
# Ten minutes to load, to compile, and to wait for encoders that start later.
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 2
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
lifecycle:
  # Time for clients to learn of the removal before new requests are refused.
  preStop: {sleep: {seconds: 5}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "vllm.mounts" -}}
- {name: model, mountPath: /model, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.enabled }}
# A whole folder, never a subPath: Kubernetes replaces what is in it, and the client reads it again.
- {name: encoder, mountPath: /etc/encoder, readOnly: true}
{{- end }}
{{- end -}}

{{- define "vllm.volumes" -}}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.modelClaim }}, readOnly: true}
# HOME: code that vLLM, Triton and torch compile.
- name: tmp
  emptyDir: {sizeLimit: 16Gi}
{{- if .Values.tls.enabled }}
- {name: encoder, secret: {secretName: {{ .Values.tls.secret }}, defaultMode: 0440}}
{{- end }}
{{- end -}}
