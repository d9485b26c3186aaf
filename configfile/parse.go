package configfile

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Parse is Load for text already in memory; name stands for the file in errors.
func Parse(name string, data []byte, kind string, into any) (err error) {
	target := reflect.ValueOf(into)
	if target.Kind() != reflect.Pointer || target.IsNil() || target.Elem().Kind() != reflect.Struct {
		return fmt.Errorf("parse configuration %s: want a pointer to a struct, have %T", name, into)
	}
	text := source{name: name, data: data}
	if len(data) > MaxSize {
		return fmt.Errorf("%s: %w: larger than %d bytes", name, ErrInvalid, MaxSize)
	}
	if nesting(data) > maxNesting {
		return fmt.Errorf("%s: %w: nested deeper than %d levels", name, ErrInvalid, maxNesting)
	}
	// The YAML library panics on some malformed text; to a caller that is one
	// more way for the text to be invalid.
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("%s: %w: not readable as YAML", name, ErrInvalid)
		}
	}()
	file, err := parser.ParseBytes(data, 0)
	if err != nil {
		return text.wrap(err)
	}
	body, err := text.document(file)
	if err != nil {
		return err
	}
	rest, err := text.header(body, kind, target.Type().Elem())
	if err != nil {
		return err
	}
	if err := text.check(rest, target.Type().Elem(), ""); err != nil {
		return err
	}
	if err := yaml.NodeToValue(rest, into, yaml.Strict()); err != nil {
		return text.wrap(err)
	}
	return nil
}

// document picks the file's only document and refuses anchors and aliases,
// which would let a small file stand for a huge value.
func (s source) document(file *ast.File) (*ast.MappingNode, error) {
	var body ast.Node
	for _, doc := range file.Docs {
		if doc.Body == nil {
			continue
		}
		if body != nil {
			return nil, s.fail(doc.Body.GetToken(), "a second YAML document; a configuration file holds one")
		}
		body = doc.Body
	}
	switch node := body.(type) {
	case nil:
		return nil, fmt.Errorf("%s: %w: empty; want apiVersion: %s and a kind", s.name, ErrInvalid, APIVersion)
	case *ast.MappingValueNode:
		return s.plain(&ast.MappingNode{BaseNode: &ast.BaseNode{}, Start: node.GetToken(), Values: []*ast.MappingValueNode{node}})
	case *ast.MappingNode:
		return s.plain(node)
	case *ast.CommentGroupNode:
		return nil, fmt.Errorf("%s: %w: only comments; want apiVersion: %s and a kind", s.name, ErrInvalid, APIVersion)
	default:
		return nil, s.fail(body.GetToken(), "want fields, such as apiVersion: "+APIVersion)
	}
}

func (s source) plain(node *ast.MappingNode) (*ast.MappingNode, error) {
	var found aliasFinder
	ast.Walk(&found, node)
	if found.token != nil {
		return nil, s.fail(found.token, "anchors, aliases and merge keys are not read; write the value out")
	}
	return node, nil
}

type aliasFinder struct{ token *token.Token }

// Visit implements ast.Visitor.
func (f *aliasFinder) Visit(node ast.Node) ast.Visitor {
	switch node.(type) {
	case *ast.AnchorNode, *ast.AliasNode, *ast.MergeKeyNode:
		if f.token == nil {
			f.token = node.GetToken()
		}
	}
	return f
}

// header checks apiVersion and kind and gives the mapping without those of the
// two that the struct has no field for.
func (s source) header(body *ast.MappingNode, kind string, into reflect.Type) (*ast.MappingNode, error) {
	fields := fieldsOf(into)
	rest := &ast.MappingNode{BaseNode: &ast.BaseNode{}, Start: body.Start, End: body.End, IsFlowStyle: body.IsFlowStyle}
	want := map[string]string{"apiVersion": APIVersion, "kind": kind}
	seen := map[string]bool{}
	for _, entry := range body.Values {
		key := keyOf(entry)
		right, special := want[key]
		if !special {
			rest.Values = append(rest.Values, entry)
			continue
		}
		if seen[key] {
			return nil, s.fail(entry.Key.GetToken(), fmt.Sprintf("%s stands twice", key))
		}
		seen[key] = true
		have := entry.Value.GetToken().Value
		if have != right {
			return nil, s.fail(entry.Value.GetToken(), fmt.Sprintf("%s is %q, want %q", key, have, right))
		}
		if _, ok := fields[key]; ok {
			rest.Values = append(rest.Values, entry)
		}
	}
	for _, key := range []string{"apiVersion", "kind"} {
		if !seen[key] {
			return nil, fmt.Errorf("%s: %w: no %s; want %s: %s", s.name, ErrInvalid, key, key, want[key])
		}
	}
	return rest, nil
}

func (s source) wrap(err error) error {
	if place, ok := errors.AsType[yaml.Error](err); ok {
		return s.fail(place.GetToken(), plainTypes(place.GetMessage()))
	}
	return fmt.Errorf("%s: %w: %w", s.name, ErrInvalid, err)
}
