package configfile

import "testing"

func TestAValueOfAWrongKindIsSaidInPlainWords(t *testing.T) {
	t.Parallel()
	for message, want := range map[string]string{
		"cannot unmarshal []interface {} into Go struct field Config.Node of type string": "is a list, want text",
		"cannot unmarshal string into Go struct field Config.Weights of type int":         "is text, want a whole number",
		"cannot unmarshal uint64 into Go value of type bool":                              "is a whole number, want true or false",
		"mapping was used where sequence is expected":                                     "is a map of fields, want a list",
		"unknown field": "unknown field",
	} {
		if got := plainTypes(message); got != want {
			t.Errorf("plainTypes(%q) = %q, want %q", message, got, want)
		}
	}
}
