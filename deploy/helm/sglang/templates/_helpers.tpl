{{- define "sglang.labels" -}}
app.kubernetes.io/name: sglang
app.kubernetes.io/part-of: encoder-service
{{- end -}}
