package source

import "context"

type flightKey struct{}

// WithFlight says that what is asked under ctx belongs to a flight, which is one
// pull of one artifact. 0 is none.
func WithFlight(ctx context.Context, id uint32) context.Context {
	return context.WithValue(ctx, flightKey{}, id)
}

// FlightOf is the flight that WithFlight gave ctx; ok is false where it has none.
// Where HubOptions.DialContext sees one, the connection never carries anything else.
func FlightOf(ctx context.Context) (id uint32, ok bool) {
	id, _ = ctx.Value(flightKey{}).(uint32)
	return id, id != 0
}
