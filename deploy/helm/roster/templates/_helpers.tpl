{{/* The names' first part: the release's name, which says roster. */}}
{{- define "roster.fullname" -}}
{{- if contains "roster" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-roster" (.Release.Name | trunc 33 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* Labels by which the pods of a component are selected: (list $ "runner"). */}}
{{- define "roster.selector" -}}
app.kubernetes.io/name: roster
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* An image: (list $ "roster-runner" "-cuda"). */}}
{{- define "roster.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- with $image.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
{{- index . 1 }}:{{ default (index . 0).Chart.AppVersion $image.tag }}{{ index . 2 -}}
{{- end -}}

{{/* Settings as variables: (list "scheduler" .Values.scheduler.settings LIST), without those that the chart sets. */}}
{{- define "roster.settings" -}}
{{- $component := index . 0 -}}
{{- $reserved := index . 2 -}}
{{- range $name, $value := index . 1 }}
{{- if has $name $reserved }}
{{- fail (printf "%s.settings.%s is set by the chart: remove it, and see values.yaml for what can be changed" $component $name) }}
{{- end }}
{{- if or (kindIs "map" $value) (kindIs "slice" $value) }}
- {name: ROSTER_{{ upper $name }}, value: {{ toJson $value | quote }}}
{{- else if and (kindIs "float64" $value) (eq (float64 (int64 $value)) $value) }}
- {name: ROSTER_{{ upper $name }}, value: {{ int64 $value | quote }}}
{{- else }}
- {name: ROSTER_{{ upper $name }}, value: {{ toString $value | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where pods run, and how their images are pulled: (list $ .Values.runner). */}}
{{- define "roster.placement" -}}
{{- with (index . 0).Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - {name: {{ . }}}
{{- end }}
{{- end }}
{{- with (index . 1).nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (index . 1).tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
