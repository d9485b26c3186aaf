package configfile

import "log/slog"

// masked is what a Secret shows in place of its value.
const masked = "***"

// Secret is a configured value that must not reach a log, an error or a debug
// page. Every way of printing it gives "***", or nothing where it is empty;
// Reveal is the only way to the value.
type Secret string

// Reveal returns the value.
func (s Secret) Reveal() string { return string(s) }

// String masks the value.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return masked
}

// GoString masks the value under %#v.
func (s Secret) GoString() string { return s.String() }

// LogValue masks the value in a log.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText masks the value in YAML and JSON.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText takes the value as it stands.
func (s *Secret) UnmarshalText(text []byte) error {
	*s = Secret(text)
	return nil
}
