package resp

import (
	"fmt"
	"strings"
)

// verb is a command that is known.
type verb struct {
	index    int // in the figures
	min, max int // arguments with the name; max 0 is any number
	open     bool
	run      func(c *conn, args [][]byte) error
}

const commandCount = 28

// commandNames are the names of the figures, the last for all others.
var commandNames = [commandCount]string{
	"get", "set", "exists", "del", "mget", "unlink", "strlen", "ttl", "pttl", "type", "hello", "auth", "ping", "echo",
	"select", "client", "info", "command", "config", "dbsize", "flushdb", "flushall", "reset", "quit", "touch", "expire", "pexpire", "other",
}

const otherCommand = commandCount - 1

var verbs = map[string]*verb{
	"get":      {min: 2, max: 2, run: (*conn).get},
	"set":      {min: 3, run: (*conn).setInline},
	"exists":   {min: 2, run: (*conn).exists},
	"touch":    {min: 2, run: (*conn).exists},
	"del":      {min: 2, run: (*conn).del},
	"unlink":   {min: 2, run: (*conn).del},
	"mget":     {min: 2, run: (*conn).mget},
	"strlen":   {min: 2, max: 2, run: (*conn).strlen},
	"ttl":      {min: 2, max: 2, run: (*conn).ttl},
	"pttl":     {min: 2, max: 2, run: (*conn).ttl},
	"expire":   {min: 3, run: (*conn).expire},
	"pexpire":  {min: 3, run: (*conn).expire},
	"type":     {min: 2, max: 2, run: (*conn).kind},
	"dbsize":   {min: 1, max: 1, run: (*conn).dbsize},
	"flushdb":  {min: 1, max: 2, run: (*conn).flushAll},
	"flushall": {min: 1, max: 2, run: (*conn).flushAll},
	"hello":    {min: 1, open: true, run: (*conn).hello},
	"auth":     {min: 2, max: 3, open: true, run: (*conn).auth},
	"ping":     {min: 1, max: 2, run: (*conn).ping},
	"echo":     {min: 2, max: 2, run: (*conn).echo},
	"select":   {min: 2, max: 2, run: (*conn).selectDatabase},
	"client":   {min: 2, run: (*conn).client},
	"info":     {min: 1, run: (*conn).info},
	"command":  {min: 1, run: (*conn).command},
	"config":   {min: 2, run: (*conn).config},
	"reset":    {min: 1, max: 1, open: true, run: (*conn).reset},
	"quit":     {min: 1, open: true, run: (*conn).end},
}

func init() {
	for i, name := range commandNames[:otherCommand] {
		verbs[name].index = i
	}
}

const notAuthenticated = "NOAUTH Authentication required."

// do does one command. An error ends the connection.
func (c *conn) do(cmd command) error {
	name := lower(cmd.args[0])
	known := verbs[string(name)]
	if known == nil {
		c.server.totals.commands[otherCommand].Add(1)
		c.notNative()
		if c.tenant == nil {
			c.error(notAuthenticated)
			return c.spill()
		}
		c.error("ERR unknown command '" + quotable(cmd.args[0], 128) + "', with args beginning with: " + beginning(cmd.args[1:]))
		return c.spill()
	}
	c.server.totals.commands[known.index].Add(1)
	if c.native && !nativeCommand(name, cmd) {
		c.notNative()
	}
	if cmd.streams {
		return c.set(cmd.args[1], cmd.size, cmd.more)
	}
	switch count := len(cmd.args); {
	case count < known.min || known.max > 0 && count > known.max:
		c.notNative()
		c.error("ERR wrong number of arguments for '" + string(name) + "' command")
	case c.tenant == nil && !known.open:
		c.error(notAuthenticated)
	default:
		if err := known.run(c, cmd.args); err != nil {
			return err
		}
	}
	return c.spill()
}

// nativeCommand says whether LMCache's native client sends such a command.
func nativeCommand(name []byte, cmd command) bool {
	if cmd.inline {
		return false
	}
	switch string(name) {
	case "exists", "get", "del":
		return len(cmd.args) == 2
	case "set":
		return cmd.streams && cmd.more == 0
	case "auth":
		return true
	}
	return false
}

// lower makes a word lower case where it lies.
func lower(word []byte) []byte {
	for i, c := range word {
		if c >= 'A' && c <= 'Z' {
			word[i] = c | 0x20
		}
	}
	return word
}

// quotable is text for an error line: nothing in it can end the line.
func quotable(text []byte, most int) string {
	text = text[:min(len(text), most)]
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, string(text))
}

func beginning(args [][]byte) string {
	var all strings.Builder
	for _, arg := range args {
		if all.Len() >= 128 {
			break
		}
		all.WriteString("'" + quotable(arg, 128) + "' ")
	}
	return all.String()
}

func (c *conn) ping(args [][]byte) error {
	if len(args) == 1 {
		c.simple("PONG")
		return nil
	}
	return c.value(args[1], nil)
}

func (c *conn) echo(args [][]byte) error { return c.value(args[1], nil) }

func (c *conn) end([][]byte) error {
	c.simple("OK")
	c.quit = true
	return nil
}

func (c *conn) auth(args [][]byte) error {
	var user []byte
	if len(args) == 3 {
		user = args[1]
	}
	if c.authenticate(user, args[len(args)-1]) {
		c.simple("OK")
	}
	return nil
}

// authenticate answers a wrong credential with the error, a right one not at all.
func (c *conn) authenticate(user, password []byte) bool {
	find := c.listening.access.Authenticate
	if find == nil {
		return true
	}
	tenant, ok := find(user, password)
	if !ok || tenant == nil {
		c.server.totals.authFailures.Add(1)
		c.error("WRONGPASS invalid username-password pair or user is disabled.")
		return false
	}
	c.become(tenant)
	return true
}

func (c *conn) hello(args [][]byte) error {
	version, rest := int64(2), args[1:]
	if c.resp3 {
		version = 3
	}
	if len(rest) > 0 {
		var ok bool
		if version, ok = parseInt(rest[0]); !ok {
			c.error("ERR Protocol version is not an integer or out of range")
			return nil
		}
		if version != 2 && version != 3 {
			c.error("NOPROTO unsupported protocol version")
			return nil
		}
		rest = rest[1:]
	}
	var user, password []byte
	withAuth, name, withName := false, "", false
	for len(rest) > 0 {
		option := lower(rest[0])
		switch {
		case string(option) == "auth" && len(rest) >= 3:
			user, password, withAuth = rest[1], rest[2], true
			rest = rest[3:]
		case string(option) == "setname" && len(rest) >= 2:
			if !validName(rest[1]) {
				c.error(wrongName)
				return nil
			}
			name, withName = string(rest[1]), true
			rest = rest[2:]
		default:
			c.error("ERR Syntax error in HELLO option '" + quotable(option, 128) + "'")
			return nil
		}
	}
	if withAuth && !c.authenticate(user, password) {
		return nil
	}
	if c.tenant == nil {
		c.error("NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time")
		return nil
	}
	if withName {
		c.name = name
	}
	c.resp3 = version == 3
	c.dict(7)
	c.bulk("server")
	c.bulk("hearth")
	c.bulk("version")
	c.bulk(redisVersion)
	c.bulk("proto")
	c.integer(version)
	c.bulk("id")
	c.integer(int64(c.id))
	c.bulk("mode")
	c.bulk("standalone")
	c.bulk("role")
	c.bulk("master")
	c.bulk("modules")
	c.header('*', 0)
	return nil
}

// redisVersion is the version of Redis whose words are spoken.
const redisVersion = "7.2.0"

func (c *conn) selectDatabase(args [][]byte) error {
	number, ok := parseInt(args[1])
	switch {
	case !ok:
		c.error("ERR value is not an integer or out of range")
	case number < 0 || number > 65535:
		c.error("ERR DB index is out of range")
	default:
		c.database = uint32(number)
		c.simple("OK")
	}
	return nil
}

func (c *conn) reset([][]byte) error {
	c.resp3, c.database, c.name, c.library, c.version = false, 0, "", "", ""
	c.become(c.listening.access.anonymous())
	if c.tenant == nil {
		c.readBy(c.server.options.AuthTimeout)
	}
	c.simple("RESET")
	return nil
}

const wrongName = "ERR Client names cannot contain spaces, newlines or special characters."

func validName(name []byte) bool {
	for _, b := range name {
		if b <= ' ' || b > '~' {
			return false
		}
	}
	return len(name) <= 256
}

func (c *conn) client(args [][]byte) error {
	sub := string(lower(append([]byte(nil), args[1]...)))
	switch {
	case sub == "setinfo" && len(args) == 4:
		switch attribute := string(lower(args[2])); {
		case !validName(args[3]):
			c.error("ERR " + attributeName(attribute) + " cannot contain spaces, newlines or special characters.")
		case attribute == "lib-name":
			c.library = string(args[3])
			c.simple("OK")
		case attribute == "lib-ver":
			c.version = string(args[3])
			c.simple("OK")
		default:
			c.error("ERR Unrecognized option '" + quotable(args[2], 128) + "'")
		}
	case sub == "setname" && len(args) == 3:
		if !validName(args[2]) {
			c.error(wrongName)
			return nil
		}
		c.name = string(args[2])
		c.simple("OK")
	case sub == "getname" && len(args) == 2:
		if c.name == "" {
			c.null()
		} else {
			c.bulk(c.name)
		}
	case sub == "id" && len(args) == 2:
		c.integer(int64(c.id))
	case sub == "info" && len(args) == 2, sub == "list":
		c.text(c.describe())
	case (sub == "no-evict" || sub == "no-touch") && len(args) == 3:
		c.simple("OK")
	case sub == "setinfo" || sub == "setname" || sub == "getname" || sub == "id" || sub == "info" || sub == "no-evict" || sub == "no-touch":
		c.error("ERR wrong number of arguments for 'client|" + sub + "' command")
	default:
		c.error("ERR unknown subcommand '" + quotable(args[1], 128) + "'. Try CLIENT HELP.")
	}
	return nil
}

func attributeName(attribute string) string { return quotable([]byte(attribute), 32) }

// describe is one line about this connection.
func (c *conn) describe() string {
	protocol := 2
	if c.resp3 {
		protocol = 3
	}
	remote, local := "", ""
	if address := c.net.RemoteAddr(); address != nil {
		remote = address.String()
	}
	if address := c.net.LocalAddr(); address != nil {
		local = address.String()
	}
	return fmt.Sprintf("id=%d addr=%s laddr=%s name=%s db=%d resp=%d lib-name=%s lib-ver=%s\n",
		c.id, remote, local, c.name, c.database, protocol, c.library, c.version)
}

func (c *conn) command(args [][]byte) error {
	if len(args) == 1 {
		c.header('*', 0)
		return nil
	}
	switch sub := string(lower(args[1])); sub {
	case "count":
		c.integer(otherCommand)
	case "docs":
		c.dict(0)
	case "info", "list", "getkeys", "getkeysandflags":
		c.header('*', 0)
	default:
		c.error("ERR unknown subcommand '" + quotable(args[1], 128) + "'. Try COMMAND HELP.")
	}
	return nil
}

func (c *conn) config(args [][]byte) error {
	if string(lower(args[1])) != "get" {
		c.error("ERR unknown subcommand '" + quotable(args[1], 128) + "'. Try CONFIG HELP.")
		return nil
	}
	c.dict(0)
	return nil
}

func (c *conn) info(args [][]byte) error {
	wanted := func(string) bool { return true }
	if len(args) > 1 {
		sections := make(map[string]bool)
		for _, arg := range args[1:] {
			switch name := string(lower(arg)); name {
			case "all", "everything", "default":
				sections["server"], sections["clients"], sections["stats"], sections["replication"] = true, true, true, true
			default:
				sections[name] = true
			}
		}
		wanted = func(name string) bool { return sections[name] }
	}
	var parts []string
	if wanted("server") {
		parts = append(parts, "# Server\r\nredis_version:"+redisVersion+"\r\nredis_mode:standalone\r\nserver_name:hearth\r\n")
	}
	// Figures are those of the client's own tenant: another's load is not its business.
	stats := c.tenant.Stats()
	if wanted("clients") {
		parts = append(parts, fmt.Sprintf("# Clients\r\nconnected_clients:%d\r\n", stats.Connections))
	}
	if wanted("stats") {
		parts = append(parts, fmt.Sprintf("# Stats\r\nkeyspace_hits:%d\r\nkeyspace_misses:%d\r\ndropped_sets:%d\r\n", stats.Hits, stats.Misses, stats.Dropped))
	}
	if wanted("replication") {
		parts = append(parts, "# Replication\r\nrole:master\r\nconnected_slaves:0\r\n")
	}
	c.text(strings.Join(parts, "\r\n"))
	return nil
}
