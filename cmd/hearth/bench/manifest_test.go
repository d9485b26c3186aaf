package bench

import (
	"net/http/httptest"
	"testing"
)

func TestTheListingOfTheResolveRowHasEveryFileOnce(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(manyHub())
	t.Cleanup(server.Close)
	if _, err := readPages(t.Context(), server.URL); err != nil {
		t.Fatal(err)
	}
}
