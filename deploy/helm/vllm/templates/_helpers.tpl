{{- define "vllm.labels" -}}
app.kubernetes.io/name: vllm
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
