//! A headless Chromium on a host of the lab, controlled through its driver by WebDriver.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use lab::hosts::{Host, RUN_DIR};
use lab::setup;
use serde_json::{Value, json};

use crate::note;

/// For the driver to start, and for a page to show what is expected.
const WAIT_MAX: Duration = Duration::from_secs(90);
/// For one answer of the driver, which may have to start a browser.
const ANSWER_MAX: Duration = Duration::from_secs(60);
const PORT: u16 = 9515;
/// The key of an element in answers.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// One browser with one tab. Dropped, it closes; after a panic it ends with its host.
pub struct Browser<'h> {
    host: &'h Host,
    driver: Child,
    session: String,
}

impl<'h> Browser<'h> {
    /// None, with a note, where the distribution has no browser to install.
    ///
    /// # Panics
    /// If it doesn't start; all functions of this file panic on failure.
    #[must_use]
    pub fn start(host: &'h Host) -> Option<Self> {
        let Some(chromium) = setup::chromium().unwrap() else {
            note("the dashboard was not tried in a browser: Ubuntu has Chromium only as a snap");
            return None;
        };
        let mut command = host.command(&chromium.driver);
        command.arg(format!("--port={PORT}")).env("HOME", RUN_DIR);
        let silent = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let driver = silent.spawn().unwrap();
        let mut browser = Self { host, driver, session: String::new() };
        let end = Instant::now() + WAIT_MAX;
        while browser.connect().is_err() {
            assert!(Instant::now() < end, "chromedriver does not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
        let profile = format!("--user-data-dir={RUN_DIR}/chromium");
        // Root can't use Chromium's sandbox, and tests run as root.
        let args = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"];
        let args: Vec<&str> =
            args.into_iter().chain(["--window-size=1280,1000", &profile]).collect();
        let options = json!({ "binary": chromium.browser, "args": args });
        let wanted =
            json!({ "capabilities": { "alwaysMatch": { "goog:chromeOptions": options } } });
        let session = browser.call("POST", "/session", &wanted);
        browser.session = format!("/session/{}", session["sessionId"].as_str().unwrap());
        Some(browser)
    }

    /// Opens an address, and waits for its page.
    pub fn open(&self, address: &str) {
        self.tell("/url", &json!({ "url": address }));
    }

    /// The address of the current page.
    #[must_use]
    pub fn address(&self) -> String {
        let path = format!("{}/url", self.session);
        self.call("GET", &path, &Value::Null).as_str().unwrap().to_owned()
    }

    /// Runs a script, and returns its result.
    #[must_use]
    pub fn run(&self, script: &str) -> Value {
        self.tell("/execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Waits until an expression is true. The page may be replaced meanwhile, and be incomplete for
    /// a moment.
    ///
    /// # Panics
    /// If it doesn't become true; with the page's text.
    pub fn wait(&self, what: &str, expression: &str) {
        let script = json!({ "script": format!("return Boolean({expression})"), "args": [] });
        let path = format!("{}/execute/sync", self.session);
        let end = Instant::now() + WAIT_MAX;
        loop {
            let answer = self.request("POST", &path, &script);
            if answer == Ok(json!(true)) {
                return;
            }
            let page = || self.run("return document.body?.innerText");
            assert!(
                Instant::now() < end,
                "not within {WAIT_MAX:?}: {what}\n{answer:?}\n{}",
                page()
            );
            // Each look takes the browser and its driver CPU time.
            std::thread::sleep(Duration::from_millis(250));
        }
    }

    /// Clicks on the first matching element, which must be visible.
    pub fn click(&self, css: &str) {
        let end = Instant::now() + WAIT_MAX;
        // A page that updates itself may replace the element meanwhile.
        while let Err(error) = self.try_click(css) {
            assert!(Instant::now() < end, "{css}: {error}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Types into an element; in a list, this chooses an entry.
    pub fn type_into(&self, css: &str, text: &str) {
        let element = self.element(css);
        self.tell(&format!("/element/{element}/value"), &json!({ "text": text }));
    }

    /// Presses the Tab key this often, from the beginning of the page, and returns the text of the
    /// focused element.
    #[must_use]
    pub fn focus_after_tabs(&self, tabs: usize) -> String {
        let key = |kind: &str| json!({ "type": kind, "value": "\u{e004}" });
        let actions: Vec<Value> = (0..tabs).flat_map(|_| [key("keyDown"), key("keyUp")]).collect();
        let keys = json!({ "type": "key", "id": "keyboard", "actions": actions });
        self.tell("/actions", &json!({ "actions": [keys] }));
        self.run("return document.activeElement.textContent").as_str().unwrap().to_owned()
    }

    /// Errors in the console.
    #[must_use]
    pub fn errors(&self) -> Vec<String> {
        let logged = self.tell("/se/log", &json!({ "type": "browser" }));
        let entries = logged.as_array().cloned().unwrap_or_default();
        entries.iter().map(|entry| entry["message"].to_string()).collect()
    }

    /// Emulates a colour scheme and the width of a screen.
    pub fn emulate(&self, scheme: &str, width: u32) {
        let media = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.devtools("Emulation.setEmulatedMedia", &json!({ "features": media }));
        let screen =
            json!({ "width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", &screen);
    }

    /// Switches scripts on or off.
    pub fn set_scripts(&self, run: bool) {
        self.devtools("Emulation.setScriptExecutionDisabled", &json!({ "value": !run }));
    }

    fn devtools(&self, command: &str, params: &Value) {
        self.tell("/goog/cdp/execute", &json!({ "cmd": command, "params": params }));
    }

    fn try_click(&self, css: &str) -> Result<Value, Value> {
        let wanted = json!({ "using": "css selector", "value": css });
        let found = self.request("POST", &format!("{}/element", self.session), &wanted)?;
        let element = found[ELEMENT].as_str().ok_or_else(|| found.clone())?;
        let path = format!("{}/element/{element}/click", self.session);
        self.request("POST", &path, &json!({}))
    }

    fn element(&self, css: &str) -> String {
        let wanted = json!({ "using": "css selector", "value": css });
        let found = self.tell("/element", &wanted);
        found[ELEMENT].as_str().unwrap_or_else(|| panic!("{css}: {found}")).to_owned()
    }

    fn tell(&self, path: &str, body: &Value) -> Value {
        self.call("POST", &format!("{}{path}", self.session), body)
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        self.host.within(|| TcpStream::connect((Ipv4Addr::LOCALHOST, PORT)))
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let answer = self.request(method, path, body);
        answer.unwrap_or_else(|error| panic!("{method} {path} {body}: {error}"))
    }

    /// The driver's answer, or its error.
    fn request(&self, method: &str, path: &str, body: &Value) -> Result<Value, Value> {
        let stream = self.connect().unwrap();
        stream.set_read_timeout(Some(ANSWER_MAX)).unwrap();
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, answer) = ask(&stream, method, path, "", &body);
        let answer: Value = serde_json::from_str(&answer).unwrap_or_default();
        if status == 200 { Ok(answer["value"].clone()) } else { Err(answer) }
    }
}

impl Drop for Browser<'_> {
    fn drop(&mut self) {
        if !self.session.is_empty() && !std::thread::panicking() {
            self.call("DELETE", &self.session.clone(), &Value::Null);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// Sends one request over a connection, with additional header lines; returns the answer's status
/// and body.
///
/// # Panics
/// If there is no answer.
pub fn ask(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> (u16, String) {
    let host = if headers.to_lowercase().contains("host:") { "" } else { "Host: 127.0.0.1\r\n" };
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\n{host}{headers}Content-Length: {length}\r\nConnection: \
         close\r\n\r\n{body}"
    )
    .unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap();
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let (name, value) = line.split_once(':').unwrap_or_default();
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    (status, String::from_utf8_lossy(&body).into_owned())
}
