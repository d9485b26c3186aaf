package tidy

import (
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/router"
)

// fieldsOf lists the paths of a configuration as its page writes them.
func fieldsOf(kind reflect.Type, prefix string) []string {
	var paths []string
	for field := range kind.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		path := prefix + name
		inner := field.Type
		if inner.Kind() == reflect.Slice && inner.Elem().Kind() == reflect.Struct {
			inner, path = inner.Elem(), path+"[]"
		}
		if inner.Kind() == reflect.Struct {
			paths = append(paths, fieldsOf(inner, path+".")...)
			continue
		}
		paths = append(paths, path)
	}
	return paths
}

func TestTheConfigurationPageNamesEveryFieldAndNoOther(t *testing.T) {
	t.Parallel()
	code := regexp.MustCompile("`([^`]+)`")
	sections := strings.Split(page(t, "docs/configuration.md"), "\n## ")
	for kind, config := range map[string]any{nodeagent.Kind: nodeagent.Config{}, router.Kind: router.Config{}} {
		at := slices.IndexFunc(sections, func(s string) bool { return strings.HasPrefix(s, "`kind: "+kind+"`") })
		if at < 0 {
			t.Fatalf("docs/configuration.md has no section on %s", kind)
		}
		var told []string
		for line := range strings.Lines(sections[at]) {
			if cells := strings.Split(line, "|"); len(cells) > 2 {
				for _, match := range code.FindAllStringSubmatch(cells[1], -1) {
					told = append(told, match[1])
				}
			}
		}
		fields := fieldsOf(reflect.TypeOf(config), "")
		for _, field := range fields {
			if !slices.Contains(told, field) {
				t.Errorf("docs/configuration.md: %s has a field %s that is not told", kind, field)
			}
		}
		for _, field := range told {
			if !slices.Contains(fields, field) {
				t.Errorf("docs/configuration.md: %s has no field %s", kind, field)
			}
		}
	}
}
