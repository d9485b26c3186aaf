package bench

import "math"

// interval gives the geometric mean of ratios and its 95 % interval, by Student's
// t over their logarithms. One ratio alone has none: all three are that.
func interval(ratios []float64) (mean, low, high float64) {
	n := float64(len(ratios))
	var sum, squares float64
	for _, r := range ratios {
		sum += math.Log(r)
	}
	center := sum / n
	for _, r := range ratios {
		squares += (math.Log(r) - center) * (math.Log(r) - center)
	}
	if n < 2 {
		return math.Exp(center), math.Exp(center), math.Exp(center)
	}
	off := student(n-1) * math.Sqrt(squares/(n-1)/n)
	return math.Exp(center), math.Exp(center - off), math.Exp(center + off)
}

// student is the 97.5 % quantile of Student's t, by the expansion around the
// normal distribution (Abramowitz and Stegun 26.7.5); from 5 degrees of freedom on
// it is right to 2 in 1,000, and nobody compares so few pairs.
func student(freedom float64) float64 {
	const z = 1.959963984540054
	z3, z5, z7 := z*z*z, z*z*z*z*z, z*z*z*z*z*z*z
	return z + (z3+z)/(4*freedom) + (5*z5+16*z3+3*z)/(96*freedom*freedom) + (3*z7+19*z5+17*z3-15*z)/(384*freedom*freedom*freedom)
}
