package configfile

import (
	"encoding"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"
)

var textType = reflect.TypeFor[encoding.TextUnmarshaler]()

// check walks the tree beside the type it will be decoded into and gives the
// first unknown field, duplicate key or unreadable text value with its place.
// What is left (a list where a map belongs, a word for a number) the decoder
// itself reports.
func (s source) check(node ast.Node, into reflect.Type, path string) error {
	for into.Kind() == reflect.Pointer {
		into = into.Elem()
	}
	if tag, ok := node.(*ast.TagNode); ok {
		node = tag.Value
	}
	if _, null := node.(*ast.NullNode); null || node == nil {
		return nil
	}
	if reflect.PointerTo(into).Implements(textType) {
		return s.checkText(node, into, path)
	}
	switch into.Kind() {
	case reflect.Struct:
		return s.checkStruct(node, into, path)
	case reflect.Map:
		for _, entry := range entriesOf(node) {
			if err := s.check(entry.Value, into.Elem(), join(path, keyOf(entry))); err != nil {
				return err
			}
		}
	case reflect.Slice, reflect.Array:
		list, ok := node.(*ast.SequenceNode)
		if !ok {
			return nil
		}
		for i, item := range list.Values {
			if err := s.check(item, into.Elem(), fmt.Sprintf("%s[%d]", path, i)); err != nil {
				return err
			}
		}
	default:
	}
	return nil
}

func (s source) checkText(node ast.Node, into reflect.Type, path string) error {
	scalar, ok := node.(ast.ScalarNode)
	if !ok {
		return s.fail(node.GetToken(), path+": want one value, not a list or a map")
	}
	text := scalar.GetToken().Value
	if literal, ok := node.(*ast.LiteralNode); ok {
		text = literal.Value.Value
	}
	if err := reflect.New(into).Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(text)); err != nil {
		return s.fail(node.GetToken(), path+": "+err.Error())
	}
	return nil
}

func (s source) checkStruct(node ast.Node, into reflect.Type, path string) error {
	fields := fieldsOf(into)
	seen := map[string]bool{}
	for _, entry := range entriesOf(node) {
		key := keyOf(entry)
		field, ok := fields[key]
		if !ok {
			return s.fail(entry.Key.GetToken(), unknown(join(path, key), key, fields))
		}
		if seen[key] {
			return s.fail(entry.Key.GetToken(), join(path, key)+" stands twice")
		}
		seen[key] = true
		if err := s.check(entry.Value, field, join(path, key)); err != nil {
			return err
		}
	}
	return nil
}

// unknown says that a field does not exist, and which one may have been meant.
func unknown(path, key string, fields map[string]reflect.Type) string {
	names := make([]string, 0, len(fields))
	for name := range fields {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if strings.EqualFold(name, key) || near(name, key) {
			return fmt.Sprintf("%s: unknown field; did you mean %s?", path, name)
		}
	}
	return fmt.Sprintf("%s: unknown field; known here: %s", path, strings.Join(names, ", "))
}

// near reports whether one insertion, deletion, change or swap turns a into b.
func near(a, b string) bool {
	if len(a) > len(b) {
		a, b = b, a
	}
	if len(b)-len(a) > 1 || len(a) < 3 {
		return false
	}
	i := 0
	for i < len(a) && a[i] == b[i] {
		i++
	}
	if len(a) < len(b) {
		return a[i:] == b[i+1:]
	}
	if i+1 >= len(a) || a[i+1:] == b[i+1:] {
		return true
	}
	return a[i] == b[i+1] && a[i+1] == b[i] && a[i+2:] == b[i+2:]
}

// fieldsOf gives the yaml names of a struct's fields with their types; inline
// structs count as their own fields.
func fieldsOf(t reflect.Type) map[string]reflect.Type {
	fields := map[string]reflect.Type{}
	for field := range t.Fields() {
		if !field.IsExported() {
			continue
		}
		name, options, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if name == "-" {
			continue
		}
		if strings.Contains(options, "inline") {
			inner := field.Type
			for inner.Kind() == reflect.Pointer {
				inner = inner.Elem()
			}
			if inner.Kind() == reflect.Struct {
				maps.Copy(fields, fieldsOf(inner))
			}
			continue
		}
		if name == "" {
			name = strings.ToLower(field.Name)
		}
		fields[name] = field.Type
	}
	return fields
}

func entriesOf(node ast.Node) []*ast.MappingValueNode {
	switch node := node.(type) {
	case *ast.MappingNode:
		return node.Values
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{node}
	}
	return nil
}

func keyOf(entry *ast.MappingValueNode) string { return entry.Key.GetToken().Value }

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
