package dradriver

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

func TestTheTableOfFeaturesIsThatOfThePage(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("CLAIMS.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^\\| `(DRA\\w+)` \\| 1\\.(\\d+) \\| 1\\.(\\d+) \\| (yes|no) \\| (.*) \\|$")
	told := row.FindAllStringSubmatch(string(text), -1)
	rows := FeatureTable()
	if len(told) != len(rows) {
		t.Fatalf("CLAIMS.md tells %d features, the table has %d", len(told), len(rows))
	}
	for i, r := range rows {
		probed := map[bool]string{true: "yes", false: "no"}[r.Probed]
		want := []string{r.Name, strconv.Itoa(r.Gated), strconv.Itoa(r.On), probed, r.Without}
		if strings.Join(told[i][1:], "|") != strings.Join(want, "|") {
			t.Errorf("CLAIMS.md: %q, the table: %q", told[i][1:], want)
		}
	}
}

func TestFeaturesFollowTheMinor(t *testing.T) {
	t.Parallel()
	for minor, lacking := range map[int]string{
		33: "DRAConsumableCapacity DRADeviceTaints DRAExtendedResource DRAPrioritizedList DRAAdminAccess DRAResourceClaimDeviceStatus",
		34: "DRAConsumableCapacity DRADeviceTaints DRAExtendedResource",
		35: "DRAConsumableCapacity DRADeviceTaints DRAExtendedResource",
		36: "", 37: "", 40: "",
	} {
		if got := strings.Join(FeaturesOf(minor).lacking(), " "); got != lacking {
			t.Errorf("1.%d lacks %q, want %q", minor, got, lacking)
		}
	}
}

func TestFeaturesAreOverruledByName(t *testing.T) {
	t.Parallel()
	f, err := FeaturesOf(35).With(map[string]bool{FeatureConsumableCapacity: true, FeaturePrioritizedList: false})
	if err != nil || !f.Has(FeatureConsumableCapacity) || f.Has(FeaturePrioritizedList) || f.Has(FeatureDeviceTaints) || f.Has("other") {
		t.Errorf("got %+v, %v", f, err)
	}
	if _, err := f.With(map[string]bool{"DRAConsumable": true}); err == nil || !strings.Contains(err.Error(), FeatureDeviceTaints) {
		t.Errorf("got %v, want an error that names the known features", err)
	}
}

func TestMinorsAreReadFromAnyVendorsVersion(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]int{"v1.37.2": 37, "v1.36.0-rc.1": 36, "v1.35+": 35, "v1.34.1-eks-abc": 34, "1.38.0": 38} {
		if got, err := minorOf(version); err != nil || got != want {
			t.Errorf("%s: %d, %v", version, got, err)
		}
	}
	for _, version := range []string{"", "v2.1.0", "v1", "v1.x"} {
		if _, err := minorOf(version); err == nil {
			t.Errorf("%q is read", version)
		}
	}
}
