{{- define "encoder.labels" -}}
app.kubernetes.io/name: encoder
app.kubernetes.io/part-of: encoder-service
{{- end -}}

{{/* Redis has other labels, so that no Service, policy or budget of the replicas selects it. */}}
{{- define "encoder.redisLabels" -}}
app.kubernetes.io/name: encoder-redis
app.kubernetes.io/part-of: encoder-service
{{- end -}}

{{- define "encoder.profile" -}}
{{- if not (hasKey .Values.profiles .Values.profile) }}{{ fail (printf "profile: there is no %q; use one of %s" .Values.profile (keys .Values.profiles | sortAlpha | join ", ")) }}{{ end -}}
{{- index .Values.profiles .Values.profile | toYaml -}}
{{- end -}}

{{/* The environment: what all replicas have, then the profile's, those of TLS, and the user's. */}}
{{- define "encoder.settings" -}}
{{- $all := dict "ENCSVC_MODEL" "/model" "ENCSVC_LISTEN" (printf "%s:50051" .Values.listen) "ENCSVC_LISTEN_UNPROTECTED" "yes" "ENCSVC_ROWS_LISTEN" (printf "%s:50052" .Values.listen) "ENCSVC_METRICS_LISTEN" (printf "%s:9464" .Values.listen) "ENCSVC_INDEX" (ternary "redis://encoder-redis:6379/0" .Values.index .Values.redis.enabled) "ENCSVC_LOG_FORMAT" "json" -}}
{{- $profile := include "encoder.profile" . | fromYaml -}}
{{- $all = mergeOverwrite $all $profile.settings -}}
{{- with .Values.tls }}{{ if .enabled }}
{{- $all = mergeOverwrite $all (dict "ENCSVC_LISTEN_UNPROTECTED" "no" "ENCSVC_TLS_CERT" "/etc/encoder/tls/tls.crt" "ENCSVC_TLS_KEY" "/etc/encoder/tls/tls.key" "ENCSVC_TLS_CLIENT_CA" (ternary "/etc/encoder/tls/ca.crt" "" .clientCertificates) "ENCSVC_TLS_PEER_CA" "/etc/encoder/tls/ca.crt" "ENCSVC_TLS_PEER_NAME" .peerName "ENCSVC_TENANTS_FILE" "/etc/encoder/access/tenants.toml" "ENCSVC_FLEET_KEY_FILE" "/etc/encoder/access/fleet.key") -}}
{{ end }}{{ end -}}
{{- range $name, $value := mergeOverwrite $all .Values.settings }}
{{ $name }}: {{ $value | quote }}
{{- end -}}
{{- end -}}
