module github.com/hearth-dev/hearth/test/e2e

go 1.26.0

require github.com/hearth-dev/hearth/test/kubelab v0.0.0

replace github.com/hearth-dev/hearth/test/kubelab => ../kubelab
