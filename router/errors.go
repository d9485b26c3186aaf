package router

import "errors"

// is says whether err's chain holds a T.
func is[T error](err error) bool {
	var target T
	return errors.As(err, &target)
}
