package configfile

import (
	"regexp"
	"strings"
)

// Messages of the YAML reader about a value of a wrong kind.
var (
	unmarshalled = regexp.MustCompile(`^cannot unmarshal (.+) into Go (?:struct field \S+|value) of type (.+)$`)
	usedWhere    = regexp.MustCompile(`^(\S+) was used where (\S+) is expected$`)
)

// plainTypes words such a message without the names of Go types.
func plainTypes(message string) string {
	for _, form := range []*regexp.Regexp{unmarshalled, usedWhere} {
		if m := form.FindStringSubmatch(message); m != nil {
			return "is " + plainType(m[1]) + ", want " + plainType(m[2])
		}
	}
	return message
}

func plainType(name string) string {
	switch {
	case strings.HasPrefix(name, "[]"), name == "sequence":
		return "a list"
	case strings.HasPrefix(name, "map["), name == "mapping":
		return "a map of fields"
	case strings.HasPrefix(name, "int"), strings.HasPrefix(name, "uint"):
		return "a whole number"
	case strings.HasPrefix(name, "float"):
		return "a number"
	case name == "bool", name == "boolean":
		return "true or false"
	case name == "string":
		return "text"
	}
	return "another kind of value"
}
