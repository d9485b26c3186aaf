module github.com/hearth-dev/hearth/test/kubelab

go 1.26.0
