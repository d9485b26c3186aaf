package v1alpha1

import (
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
)

// ErrInvalid is wrapped by every error of Decode and Validate.
var ErrInvalid = errors.New("configuration is not valid")

// maxPath bounds a container path, in bytes.
const maxPath = 1024

// maxPullDeadline bounds PullDeadline.
const maxPullDeadline = 24 * time.Hour

// strict decodes JSON or YAML; an unknown or doubled field is an error.
var strict = newDecoder()

func newDecoder() runtime.Decoder {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(GroupVersion, &WeightsConfig{}, &KVConfig{}, &ClassConfig{})
	return json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, json.SerializerOptions{Strict: true})
}

// Decode reads one configuration and validates it. Errors name the kind and
// the field and wrap ErrInvalid.
func Decode(raw []byte) (Config, error) {
	object, kind, err := strict.Decode(raw, nil, nil)
	switch {
	case runtime.IsMissingKind(err) || runtime.IsMissingVersion(err):
		return nil, fmt.Errorf("%w: apiVersion and kind must be set, such as %s and %s", ErrInvalid, GroupVersion, KindWeights)
	case runtime.IsNotRegisteredError(err):
		return nil, fmt.Errorf("%w: unknown kind %s of %s; known are %s, %s and %s of %s",
			ErrInvalid, kind.Kind, kind.GroupVersion(), KindWeights, KindKV, KindClass, GroupVersion)
	case err != nil && kind != nil:
		return nil, fmt.Errorf("%w: %s: %s", ErrInvalid, kind.Kind, strings.TrimPrefix(err.Error(), "strict decoding error: "))
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	config, ok := object.(Config)
	if !ok {
		return nil, fmt.Errorf("%w: %T is no configuration", ErrInvalid, object)
	}
	if err := config.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", kind.Kind, err)
	}
	return config, nil
}

// Validate implements Config.
func (c *WeightsConfig) Validate() error {
	if c.Ref != "" && !strings.HasPrefix(c.Ref, "hub://") {
		return fmt.Errorf("%w: ref %q: want hub://org/name@revision", ErrInvalid, c.Ref)
	}
	return validatePath(c.ContainerPath)
}

// Validate implements Config.
func (c *KVConfig) Validate() error { return validatePath(c.ContainerPath) }

// Validate implements Config.
func (c *ClassConfig) Validate() error {
	if d := c.PullDeadline.Duration; d < 0 || d > maxPullDeadline {
		return fmt.Errorf("%w: pullDeadline %s: want 0 to %s", ErrInvalid, d, maxPullDeadline)
	}
	return nil
}

// reserved are the folders of a container that no mount of ours may hide or
// sit in: what the kernel, the runtime and every image bring.
var reserved = []string{"/proc", "/sys", "/dev", "/etc", "/var/run", "/run", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/boot"}

// validatePath checks a container path; an empty one means the default.
func validatePath(p string) error {
	wrong := func(why string) error { return fmt.Errorf("%w: containerPath %q: %s", ErrInvalid, p, why) }
	switch {
	case p == "":
		return nil
	case len(p) > maxPath:
		return fmt.Errorf("%w: containerPath of %d bytes: want at most %d", ErrInvalid, len(p), maxPath)
	case !path.IsAbs(p):
		return wrong("want an absolute path")
	case path.Clean(p) != p:
		return wrong("want a clean path, without .., // or a / at its end")
	case p == "/" || p == "/var":
		return wrong("it would hide the container's own files")
	case strings.ContainsFunc(p, func(r rune) bool { return r < ' ' || r == 0x7f || r == ':' || r == '\\' }):
		return wrong("control characters, colons and backslashes are not allowed")
	}
	for _, folder := range reserved {
		if p == folder || strings.HasPrefix(p, folder+"/") {
			return wrong("it is inside " + folder + ", which belongs to the container's system")
		}
	}
	return nil
}
