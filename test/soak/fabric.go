package soak

import "github.com/hearth-dev/hearth/router/pool"

// models offer each pool under its own name, and the other where none of it
// can take a request.
func models() []pool.ModelConfig {
	var list []pool.ModelConfig
	for i, name := range Models {
		list = append(list, pool.ModelConfig{Name: name, Targets: []pool.TargetConfig{
			{Pool: name, ServedModel: ServedModel, Weight: 1}, {Pool: Models[1-i], ServedModel: ServedModel},
		}})
	}
	return list
}
